package integration

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	fleetv1alpha1 "github.com/drover-sh/drover/api/fleet/v1alpha1"
)

// patience is how long a test waits for what has to come. It is a limit for hangs, not an expectation of speed.
const patience = 2 * time.Minute

// cleanupContext outlives the test's own context, which ends before its cleanups run.
func cleanupContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// eventually polls until done says so. state is what a reader of the failure needs to know about the last look.
func eventually(t *testing.T, what string, check func(context.Context) (done bool, state string)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if state, ok := poll(ctx, check); !ok {
		t.Fatalf("waited in vain until %s; at last: %s\n%s", what, state, dump())
	}
}

func poll(ctx context.Context, check func(context.Context) (bool, string)) (state string, ok bool) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		done, now := check(ctx)
		if done {
			return now, true
		}
		if ctx.Err() == nil || state == "" {
			state = now // not what the end of the wait itself did to the last look
		}
		select {
		case <-ctx.Done():
			return state, false
		case <-tick.C:
		}
	}
}

// list reads objects and fails the check with the error as its state.
func list(ctx context.Context, into client.ObjectList, opts ...client.ListOption) string {
	if err := env.client.List(ctx, into, opts...); err != nil {
		return err.Error()
	}
	return ""
}

// dump shows the cluster as far as our stories go, and the end of every program's log.
func dump() string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var b strings.Builder

	var pods corev1.PodList
	fmt.Fprintf(&b, "pods: %s", list(ctx, &pods))
	for _, line := range tally(pods.Items, func(p corev1.Pod) string {
		state := string(p.Status.Phase)
		switch {
		case p.DeletionTimestamp != nil:
			state = "Terminating"
		case p.Spec.NodeName == "":
			state = "Unbound"
		}
		message := ""
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				message = c.Message
			}
		}
		return fmt.Sprintf("%s %s %s", p.Namespace, state, message)
	}) {
		fmt.Fprintf(&b, "\n  %s", line)
	}
	var nodes corev1.NodeList
	fmt.Fprintf(&b, "\nnodes: %s", list(ctx, &nodes))
	for _, line := range tally(nodes.Items, func(n corev1.Node) string {
		return fmt.Sprintf("%s managed=%t ready=%t unschedulable=%t", n.Labels[corev1.LabelInstanceTypeStable],
			n.Labels[fleetv1alpha1.LabelMachine] != "", nodeReady(&n), n.Spec.Unschedulable)
	}) {
		fmt.Fprintf(&b, "\n  %s", line)
	}
	var requests fleetv1alpha1.CapacityRequestList
	fmt.Fprintf(&b, "\ncapacity requests: %s", list(ctx, &requests))
	for _, line := range tally(requests.Items, func(r fleetv1alpha1.CapacityRequest) string {
		return r.Namespace + " " + string(r.Status.Phase)
	}) {
		fmt.Fprintf(&b, "\n  %s", line)
	}
	var upcoming fleetv1alpha1.UpcomingNodeList
	fmt.Fprintf(&b, "\nupcoming nodes: %s", list(ctx, &upcoming))
	for _, line := range tally(upcoming.Items, func(u fleetv1alpha1.UpcomingNode) string {
		return string(u.Status.Phase) + " " + u.Status.Message
	}) {
		fmt.Fprintf(&b, "\n  %s", line)
	}
	logs, _ := filepath.Glob(filepath.Join(env.dir, "fleets", "current", "logs", "*.log"))
	for _, log := range logs {
		fmt.Fprintf(&b, "\nthe end of %s:\n%s", filepath.Base(log), tail(log, 30))
	}
	return b.String()
}

// tally counts equal descriptions and returns them in a stable order.
func tally[T any](items []T, describe func(T) string) []string {
	counts := map[string]int{}
	for _, item := range items {
		counts[describe(item)]++
	}
	var lines []string
	for description, n := range counts {
		lines = append(lines, fmt.Sprintf("%d× %s", n, description))
	}
	slices.Sort(lines)
	return lines
}

func tail(path string, n int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimRight(data, "\n"), []byte("\n"))
	lines = slices.DeleteFunc(lines, func(line []byte) bool {
		// The test's API server has no front proxy, which its clients regret again and again.
		return bytes.Contains(line, []byte("extension-apiserver-authentication"))
	})
	return string(bytes.Join(lines[max(0, len(lines)-n):], []byte("\n")))
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// namespace makes a namespace for the test and removes it with everything in it.
func namespace(t *testing.T, name string) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := env.client.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeNamespace(t, name) })
	return name
}

func removeNamespace(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := cleanupContext()
	defer cancel()
	// By force: a pod whose node is gone has no kubelet that would confirm its end.
	if err := env.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(name),
		client.GracePeriodSeconds(0)); err != nil {
		t.Errorf("removing the pods of namespace %s: %v", name, err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := client.IgnoreNotFound(env.client.Delete(ctx, ns)); err != nil {
		t.Errorf("removing namespace %s: %v", name, err)
		return
	}
	if state, ok := poll(ctx, func(ctx context.Context) (bool, string) {
		err := env.client.Get(ctx, client.ObjectKeyFromObject(ns), ns)
		return apierrors.IsNotFound(err), fmt.Sprintf("%v %v", err, ns.Status.Conditions)
	}); !ok {
		t.Errorf("namespace %s does not go: %s\n%s", name, state, dump())
	}
}
