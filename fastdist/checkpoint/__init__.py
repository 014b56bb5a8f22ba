"""What is saved, and loaded again"""
