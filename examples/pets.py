"""Cat or dog? Fine-tune a pretrained ResNet on the Oxford-IIIT Pets, which are downloaded (800 MB) unless --path has them:

    python examples/pets.py
    fastdist launch examples/pets.py                            (all GPUs of this machine)
    accelerate launch examples/pets.py --epochs 3
    torchrun --nproc-per-node 2 examples/pets.py --path pets/images
"""
from argparse import ArgumentParser, BooleanOptionalAction
from fastai.vision.all import *
from fastdist.all import *

def is_cat(name): return name[0].isupper()

if __name__ == '__main__':
    p = ArgumentParser(description="Cat or dog?")
    p.add_argument('--path', type=Path, help="folder of images; the names of cats begin with a capital")
    p.add_argument('--epochs', type=int, default=1)
    p.add_argument('--bs', type=int, default=64, help="batch size of each worker")
    p.add_argument('--size', type=int, default=224, help="of the images, in pixels")
    p.add_argument('--arch', default='resnet34', help="a model of torchvision")
    p.add_argument('--pretrained', action=BooleanOptionalAction, default=True)
    args = p.parse_args()

    # rank 0 downloads, the others wait and then find it there; so it is with the pretrained weights
    try: path = args.path or rank0_first(untar_data, URLs.PETS)/'images'
    except OSError as e: p.error(f"the images could not be downloaded ({e}): --path is a folder that has them")
    # the seed: all workers must hold back the same images
    dls = ImageDataLoaders.from_name_func(path, get_image_files(path), is_cat, seed=42, bs=args.bs, item_tfms=Resize(args.size))
    try: learn = rank0_first(vision_learner, dls, getattr(models, args.arch), pretrained=args.pretrained, metrics=error_rate)
    except OSError as e: p.error(f"the weights of {args.arch} could not be downloaded ({e}): --no-pretrained does without")
    with learn.distrib_ctx(): learn.fine_tune(args.epochs)
