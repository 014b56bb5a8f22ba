"""Arguments of a context, checked once"""
