"""`gdpa compare`: functions side by side: are they right, what do they cost, and how does a model learn with them?

plan.py says what is compared and on what, training.py trains, speed.py times, page.py and plot.py make one HTML file of
it (template.py is its layout), command.py is the command.
"""
