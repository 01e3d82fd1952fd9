"""What every process in the background needs.

Tasks that never end it, a log file, sd_notify(3), how long to wait before trying again.
"""
