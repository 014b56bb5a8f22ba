"""What workers send each other"""
