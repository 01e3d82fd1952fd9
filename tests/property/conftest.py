"""Property tests are about answers, not about how long a busy machine takes for one."""

from hypothesis import settings

settings.register_profile("cloakfs", deadline=None)
settings.load_profile("cloakfs")
