"""fastai's dataloader_spawn.py: loader processes that are started afresh, as they are on Windows and macOS, and the learning rate finder.

    python examples/fastai/dataloader_spawn.py
    fastdist launch -n 2 examples/fastai/dataloader_spawn.py
"""
from fastai.vision.all import *
from fastdist.all import *
from shapes import *

def get_data(path, presize, size, bs, batch_tfms, num_workers):
    return DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, splitter=GrandparentSplitter(valid_name='val'),
                     get_y=parent_label, item_tfms=Resize(presize),
                     batch_tfms=aug_transforms(min_scale=0.5, size=size) if batch_tfms is None else batch_tfms).dataloaders(path, bs=bs, num_workers=num_workers)

def get_model(c):
    return nn.Sequential(*[ConvLayer(ni, nf, stride=2) for ni,nf in ((3,16), (16,32), (32,64))],
                         nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64, c))

def main(path=None, num_workers=1, bs=4, batch_tfms=None, split_batches=False):
    set_seed(42)
    dls = get_data(get_shapes(path)/'images', 40, 32, bs, batch_tfms, num_workers)
    learn = Learner(dls, get_model(dls.c), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    with learn.distrib_ctx(split_batches=split_batches):
        lr = learn.lr_find(show_plot=False, num_it=19).valley
        learn.fit_one_cycle(1, lr)
    return learn

if __name__ == '__main__': # a process that is spawned imports this file again
    multiprocessing.set_start_method('spawn')
    main()
