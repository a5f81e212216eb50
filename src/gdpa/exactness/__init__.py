"""The accuracy contract, as code: how close to float64 a 16-bit result must be, whatever the scores.

"Exact" means no error beyond the roundings that the definition names: p and ds once to the input dtype, each result
once. Errors are relative to the RMS of the exact result of that very case.

(a) RMS error at most 1.15 times, largest error at most 2 times, that of the definition with just those roundings, for
    scores of mean -3 to 3 and spread 0.3 to 4;
(b) RMS error never above plain PyTorch's (eager, same dtype, same function), for means -8 to 8 and spreads 0.1 to 4.

``draw`` makes inputs whose scores have a given mean and spread, ``formula`` is a call without them. ``results`` has
what is compared (exact and definition by ``tiles``, ``plain``, and gdpa itself), ``rules`` compares. Tests, `gdpa
check` and `gdpa fuzz` all judge by these.
"""
