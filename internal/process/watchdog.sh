# Ends the processes of a group when their owner is gone. $1 is the directory of pid files; standard input is a pipe that
# the owner holds. "done" means that the owner has stopped everything itself; the end of the input means that it died.
trap '' INT TERM HUP
while read -r line; do
  [ "$line" = done ] && exit 0
done
for file in "$1"/*; do
  [ -f "$file" ] || continue
  read -r pid < "$file" || [ -n "$pid" ] || continue
  case $pid in '' | 1 | *[!0-9]*) continue ;; esac
  kill -KILL "-$pid" 2>/dev/null
  rm -f "$file"
done
