"""Commands that read a checkpoint"""
