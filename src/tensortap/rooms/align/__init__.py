"""Align: do a trainer and an inference engine hold the same weights and compute the same?"""
