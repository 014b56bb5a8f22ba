"""Disc or box? A network from images whose names say what they are: fastai's first example.

    python examples/fastai/image_classifier.py
    fastdist launch -n 2 examples/fastai/image_classifier.py
"""
from fastai.vision.all import *
from fastdist.all import *
from fastcore.script import *
from shapes import *

def is_disc(name): return name[0].isupper()

@call_parse
def main(
    path:str=None, # Folder of the images, which are drawn if they are not there
    epochs:int=1, # After one in which the body is frozen
    bs:int=16, # Batch size of each worker
    arch:str='small_resnet', # or a model of torchvision, such as resnet34
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42) # before a split that draws, which has to be the same in all workers
    path = get_shapes(path)/'images'
    dls = ImageDataLoaders.from_name_func(path, get_image_files(path), is_disc, valid_pct=0.2, bs=bs, item_tfms=Resize(32))
    learn = vision_learner(dls, globals()[arch], pretrained=False, metrics=error_rate)
    with learn.distrib_ctx(split_batches=split_batches): learn.fine_tune(epochs)
    return learn
