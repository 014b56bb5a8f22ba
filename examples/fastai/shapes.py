"Small images that are drawn, in place of a download: a disc or a box on noise, with its mask and its centre"
import tempfile
import numpy as np, pandas as pd
from pathlib import Path
from PIL import Image, ImageDraw
from fastai.vision.models.xresnet import ResBlock, XResNet
from fastdist.all import rank0_first

FOLDER = Path(tempfile.gettempdir())/'fastdist_shapes'

def _draw(i, size):
    "Image, mask and centre of shape `i`; even ones are discs"
    rng = np.random.default_rng(i)
    x,y,r = (int(rng.integers(lo*size, hi*size)) for lo,hi in ((.3,.7),(.3,.7),(.15,.25)))
    img = Image.fromarray(rng.integers(0, 120, (size,size,3), dtype=np.uint8))
    mask,box = Image.new('L', (size,size)),(x-r,y-r,x+r,y+r)
    for im,color in ((img,tuple(map(int, rng.integers(120, 256, 3)))),(mask,1)):
        draw = ImageDraw.Draw(im)
        draw.rectangle(box, fill=color) if i%2 else draw.ellipse(box, fill=color)
    return img,mask,(x,y)

def _make(path, n, size):
    if (path/'points.csv').exists(): return
    points = []
    for i in range(n):
        img,mask,(x,y) = _draw(i, size)
        kind,split = ('Disc','box')[i%2],'val' if i%10 in (3,6) else 'train'
        for folder,im in ((path/'images'/split/kind,img),(path/'masks',mask)):
            folder.mkdir(parents=True, exist_ok=True)
            im.save(folder/f'{kind}_{i}.png')
        points.append((f'{kind}_{i}.png', x, y))
    pd.DataFrame(points, columns=['name','x','y']).to_csv(path/'points.csv', index=False)

def get_shapes(path=None, n=100, size=48):
    "Draw `n` images into `path`: images/train or val/Disc or box, masks, points.csv. Rank 0 does it, and the others find them there"
    path = Path(path or FOLDER)
    rank0_first(_make, path, n, size)
    return path

def small_resnet(pretrained=False, **kwargs):
    "A ResNet that trains in seconds on a CPU"
    return XResNet(ResBlock, 1, [1,1,1,1], stem_szs=(8,16,64), widen=.25, **kwargs)
