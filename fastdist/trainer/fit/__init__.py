"""What happens in a fit: its start, its training steps, its evaluations"""
