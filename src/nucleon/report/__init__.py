"""Runs on disk, their figures, and one self-contained HTML page of several runs.

Imports `nucleon.claims`, whose results it stores and draws, and matplotlib and jinja2.
"""
