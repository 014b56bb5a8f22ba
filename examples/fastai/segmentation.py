"""Which pixels are the shape's? A U-Net, as fastai's tutorial has it for CamVid.

    python examples/fastai/segmentation.py
    fastdist launch -n 2 examples/fastai/segmentation.py
"""
from fastai.vision.all import *
from fastdist.all import *
from fastcore.script import *
from shapes import *

@call_parse
def main(
    path:str=None, # Folder of the images, which are drawn if they are not there
    epochs:int=1, # After one in which the body is frozen
    bs:int=8, # Batch size of each worker
    arch:str='small_resnet', # or a model of torchvision, such as resnet34
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    path = get_shapes(path)
    dls = SegmentationDataLoaders.from_label_func(path, get_image_files(path/'images'), lambda o: path/'masks'/o.name, bs=bs,
                                                  codes=['noise','shape'], item_tfms=Resize(32))
    learn = unet_learner(dls, globals()[arch], pretrained=False, metrics=[foreground_acc, Dice()])
    with learn.distrib_ctx(split_batches=split_batches): learn.fine_tune(epochs)
    return learn
