"""One true number out of many"""
