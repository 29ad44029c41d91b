#!/bin/sh
# The story of docs/kubernetes.md on a real cluster: builds the CPU images, makes a kind cluster, installs the demo,
# tests it, scales it while it runs, changes its gate, waits for its end, and removes everything.
# Needs docker, kind, kubectl and helm on PATH. KEEP=1 leaves the cluster.
set -eu
cd "$(dirname "$0")/.."
cluster="${CLUSTER:-headrace-test}"
tag=0.1.0-cpu
namespace=headrace
for program in docker kind kubectl helm; do
  command -v "$program" >/dev/null || { echo "test-kind: $program is not installed" >&2; exit 2; }
done
say() { echo "test-kind: $*"; }
k() { kubectl --context "kind-$cluster" --namespace "$namespace" "$@"; }
h() { helm --kube-context "kind-$cluster" --namespace "$namespace" "$@"; }
finish() {
  code=$?
  if [ "$code" -ne 0 ]; then
    k get pods,events --sort-by=.metadata.creationTimestamp || true
    for part in queue coordinator trainer rollouter; do
      say "the end of the log of $part"
      k logs "deployment/demo-$part" --all-containers --tail=40 || true
    done
  fi
  [ "${KEEP:-0}" = 1 ] || kind delete cluster --name "$cluster" >/dev/null 2>&1 || true
  exit "$code"
}
# Until a command succeeds, for so many seconds.
within() {
  seconds="$1"
  shift
  until "$@" >/dev/null 2>&1; do
    seconds=$((seconds - 2))
    [ "$seconds" -gt 0 ] || { echo "test-kind: waited in vain for: $*" >&2; return 1; }
    sleep 2
  done
}
ready_rollouters() { [ "$(k get deployment demo-rollouter -o 'jsonpath={.status.readyReplicas}')" = "$1" ]; }
trainer_says() { k logs deployment/demo-trainer -c trainer | grep -q "$1"; }

make images DEVICE=cpu TAG="$tag"
kind create cluster --name "$cluster"
trap finish EXIT
for image in queue coordinator trainer rollouter; do
  kind load docker-image --name "$cluster" "headrace/$image:$tag"
done
kubectl --context "kind-$cluster" create namespace "$namespace"
kubectl --context "kind-$cluster" label namespace "$namespace" pod-security.kubernetes.io/enforce=restricted
values="--values helm/headrace/ci/demo-cpu.yaml"
say "install"
# shellcheck disable=SC2086
h install demo helm/headrace $values --wait --timeout 15m
h test demo
say "scale up while it runs"
k scale deployment/demo-rollouter --replicas=3
within 300 ready_rollouters 3
say "change the gate: no pod is replaced, and the number of rollouters stays"
before="$(k get pods -o name | sort)"
# shellcheck disable=SC2086
h upgrade demo helm/headrace $values --set-json config.async_training.staleness_threshold=0.75 --wait --timeout 5m
[ "$(k get pods -o name | sort)" = "$before" ]
say "what the run was begun with cannot change"
# shellcheck disable=SC2086
if h upgrade demo helm/headrace $values --set config.seed=7 >/dev/null 2>&1; then
  say "an upgrade with another seed was let through"
  exit 1
fi
say "the coordinator ends, the trainer goes on"
k delete pod -l app.kubernetes.io/component=coordinator --wait=false
say "wait for the end"
within 1800 trainer_says "completed; waiting to be stopped"
say "uninstall leaves two volumes"
h uninstall demo --wait
[ "$(k get pvc -o name | sort | tr '\n' ' ')" = \
  "persistentvolumeclaim/data-demo-redis-0 persistentvolumeclaim/demo-checkpoints " ]
say "done"
