#!/bin/sh
# Builds and starts all containers, and waits until they are healthy: up.sh COMPOSE…, either of its two programs.
set -eu
# How long to wait after the last container was started.
seconds=${UP_SECONDS:-600}

states() {
    # shellcheck disable=SC2046  # one word for each container
    docker inspect --format '{{.Name}} {{if .State.Health}}{{.State.Health.Status}}{{else}}{{.State.Status}}{{end}}' \
        $("$@" ps --quiet)
}

"$@" up --build --detach
while states "$@" | grep -qvE ' (healthy|running)$'; do
    seconds=$((seconds - 1))
    if [ "$seconds" -le 0 ]; then
        states "$@"
        "$@" logs --tail=20
        exit 1
    fi
    sleep 1
done
states "$@"
