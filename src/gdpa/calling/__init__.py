"""What lies between the public functions and the backends: decisions made once, a short way for eager calls.

api.attention    first asks ``direct.call``. A plain eager call is looked up by the properties of its arguments
                 (``marks``, ``more``): the DirectPlan that is found says all that was decided at the first call of
                 its kind, and runs the backend inside one autograd.Function, past the dispatcher. ``layouts`` says
                 how each public form's tensors become the backend's (problem.py), and back.
ops              Any other call, and the first of its kind, is checked in full (api.make_call), and goes through the
                 operator, which finds its own plan in ``plans``.
``warming``      compiles the kernels of a call without running it: gdpa.warm_up, and the backward of a new function
                 beside its first forward.
"""
