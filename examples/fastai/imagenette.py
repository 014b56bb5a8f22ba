"""fastai's train_imagenette.py: an xresnet, random crops, label smoothing, a flat and then falling learning rate.

    python examples/fastai/imagenette.py --epochs 5
    fastdist launch -n 2 examples/fastai/imagenette.py --mixup 0.4
"""
from fastai.vision.all import *
from fastai.callback.mixup import *
from fastdist.all import *
from fastcore.script import *
from shapes import *

def get_dls(path, size, bs, min_scale, flip):
    return DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label,
                     splitter=GrandparentSplitter(valid_name='val'), item_tfms=[RandomResizedCrop(size, min_scale=min_scale), FlipItem(flip)],
                     batch_tfms=Normalize.from_stats(*imagenet_stats)).dataloaders(path, bs=bs)

@call_parse
def main(
    path:str=None, # Folder with train/ and val/, in which there is a folder for each class; by default drawn shapes
    lr:float=1e-2, # Learning rate
    size:int=32, # Of the crops, in pixels
    epochs:int=3,
    bs:int=16, # Batch size of each worker
    min_scale:float=0.35, # Smallest crop, as a part of the image
    flip:float=0.5, # How often an image is flipped
    mixup:float=0., # Alpha of MixUp
    opt:str='ranger', # Optimizer
    arch:str='small_resnet', # or a model of fastai's, such as xresnet18
    fp16:bool=False, # Train with mixed precision?
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    dls = get_dls(path or get_shapes()/'images', size, bs, min_scale, flip)
    learn = Learner(dls, globals()[arch](n_out=dls.c, act_cls=Mish), opt_func=globals()[opt], metrics=accuracy,
                    loss_func=LabelSmoothingCrossEntropy())
    if fp16: learn = learn.to_fp16()
    # fastai's script asks for a GPU too (`if num_distrib() and n_gpu`). Without one each worker would train a model of its own, in
    # `parallel_ctx`, of which there is a warning. `distrib_ctx` alone is enough: in one process it simply trains.
    ctx = partial(learn.distrib_ctx, split_batches=split_batches) if num_distrib() else learn.parallel_ctx
    with ctx(): learn.fit_flat_cos(epochs, lr, wd=1e-2, cbs=MixUp(mixup) if mixup else [])
    return learn
