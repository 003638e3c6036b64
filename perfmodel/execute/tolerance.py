"""What the gradient check lets pass. (No torch here: the parent process judges the ranks' errors.)"""

#: Largest relative error that a correct fp32 program shows, with room: measured ones are below 1e-5.
TOLERANCE = 1e-4
#: A gradient smaller than this share of the largest one is compared with that share instead of itself.
ROUND_OFF_FLOOR = 1e-2
