"""A failure, or a stop, of one worker is one of all"""
