"""Where is the middle of the shape? Regression of a point, as fastai's tutorial has it for the pose of a head.

    python examples/fastai/keypoints.py
    fastdist launch -n 2 examples/fastai/keypoints.py
"""
from fastai.vision.all import *
from fastdist.all import *
from fastcore.script import *
from shapes import *

@call_parse
def main(
    path:str=None, # Folder of the images, which are drawn if they are not there
    epochs:int=2,
    lr:float=3e-3, # Learning rate
    bs:int=16, # Batch size of each worker
    arch:str='small_resnet', # or a model of torchvision, such as resnet34
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    path = get_shapes(path)
    points = pd.read_csv(path/'points.csv', index_col='name')
    dls = DataBlock((ImageBlock, PointBlock), get_items=get_image_files, get_y=lambda o: tensor(points.loc[o.name].values),
                    splitter=RandomSplitter(), item_tfms=Resize(32)).dataloaders(path/'images', bs=bs)
    learn = vision_learner(dls, globals()[arch], pretrained=False, y_range=(-1,1), metrics=mae)
    with learn.distrib_ctx(split_batches=split_batches): learn.fit_one_cycle(epochs, lr)
    return learn
