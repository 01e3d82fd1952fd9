"""Properties and machines try the same examples each time, so that the suite says the same of the same code.

`--hypothesis-profile=explore` has hypothesis choose new ones, as scripts/campaign does. Neither is about how long a
busy machine takes for an answer.
"""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("suite")
