"""How processes of a job find each other, make a process group, and leave it"""
