"""Training from a file"""
