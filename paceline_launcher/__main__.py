"""``python -m paceline_launcher``: the ``paceline`` command."""

from paceline.user_code import search_start_directory_last

# Before any other import: a user's policy_worker.py must not be found in place of Paceline's.
search_start_directory_last()

from paceline_launcher.cli import main  # noqa: E402

main()
