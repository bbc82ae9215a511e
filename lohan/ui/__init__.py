"""The pages of `lohan ui` and `lohan report`: plans, runs and their charts in a browser.

traces      the traces of all ranks of a run on one clock
runs        the logs and the state of run folders
view        everything that the page of a run shows, as JSON
report      the page of one or several runs as one file
plans       quick answers about a model on a machine, and the command that plans it
processes   the `lohan` processes that the pages start
server      the web application
static/     the pages themselves: plain HTML, CSS and JavaScript modules without a build step
"""
