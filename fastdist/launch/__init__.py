"""The commands that start workers"""
