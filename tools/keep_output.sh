#!/bin/sh
# Runs a compiler and keeps what it prints beside the object, as <object>.log, so that the resource
# check sees every kernel also after an incremental build. Quiet when the compiler succeeds.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" > "$object.log" 2>&1
status=$?
[ $status -eq 0 ] || cat "$object.log"
exit $status
