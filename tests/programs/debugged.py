"""Stops in a debugger, then prints what the person there may have changed."""

secret = 6 * 7
breakpoint()
print("after", secret)
