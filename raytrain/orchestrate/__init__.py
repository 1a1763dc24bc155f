"""Everything that imports Ray."""

import os

# Ray warns of more than four worker processes a core, whatever they do. On a laptop most of ours
# wait for messages, so it would be said of every run. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "PYTHON worker processes have been started")
