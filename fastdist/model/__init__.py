"""Changes to a model that no strategy owns"""
