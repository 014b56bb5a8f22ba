"""A checkpoint on disk"""
