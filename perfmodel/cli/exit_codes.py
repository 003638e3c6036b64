"""Exit codes of the commands."""

import signal

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 2
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells
EXIT_INTERRUPTED = EXIT_SIGNAL + signal.SIGINT
EXIT_UNREAD = EXIT_SIGNAL + signal.SIGPIPE  # the reader of standard output closed it, so the work is incomplete
