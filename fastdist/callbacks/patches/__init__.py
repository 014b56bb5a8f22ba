"""What fastai's own callbacks need on many workers"""
