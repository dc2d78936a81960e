# To be sourced, with $out (a folder) set: runs parts of a benchmark, keeps what each printed, counts those that failed.
#   wanted: names of the parts to run, separated by spaces; all of them where it is empty.
failed=0
wanted=${wanted:-}
pytest=(python3 -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --import-mode=importlib --tb=short)
part() { # name, seconds, command
    local name=$1 limit=$2
    shift 2
    [[ -z $wanted || " $wanted " == *" $name "* ]] || return 0
    echo "== $name"
    local status=0
    timeout "$limit" "$@" > "$out/$name.txt" 2>&1 || status=$?
    [ "$status" = 0 ] || { failed=$((failed + 1)); echo "== $name: status $status"; }
    tail -n 60 "$out/$name.txt"
}
