"""What watches over the workers, and tells each of them what befalls the others"""
