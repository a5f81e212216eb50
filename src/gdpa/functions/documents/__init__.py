"""Functions and masks as documents, what JSON has, and back.

``graphs``   graphs of the compiler, and those that torch has recorded
``checks``   documents from elsewhere, which are checked node by node before anything is made of them
``carried``  whole functions and masks, as exported programs carry them
"""
