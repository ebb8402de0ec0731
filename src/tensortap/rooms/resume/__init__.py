"""Resume: does a program that goes on from its checkpoint compute the same?"""
