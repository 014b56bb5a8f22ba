"""How tensors, and the modules that have them, are divided between workers"""
