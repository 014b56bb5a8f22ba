"""Buffers that a forward changes"""
