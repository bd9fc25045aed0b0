package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	"github.com/drover-sh/drover/sharding"
)

// A change of the members is not a change of the objects: none is written, and nobody lists what it keeps. Writes are
// counted in etcd, lists at the API server.
func TestMembershipChangesWriteNothingAndListOnlyWhatMoves(t *testing.T) {
	dir := t.TempDir()
	policy, log := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "audit.log")
	if err := os.WriteFile(policy, []byte(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [list]
  resources: [{group: parentchild.drover.sh}]
- level: None
`), 0o644); err != nil {
		t.Fatal(err)
	}
	// A member that loses its Lease, because the machine stands still, is one that dies and comes back.
	c := start(t, options{members: 3, coordinators: 1, handoff: lbv1alpha1.HandoffExclusive, lease: 20 * time.Second,
		apiServer: map[string][]string{"audit-policy-file": {policy}, "audit-log-path": {log}}})
	newUsers(c, 1).create(300)
	c.eventually("three members have their share", func(ctx context.Context) error { return c.settled(ctx, 3) })
	c.eventually("every Parent has its Child", c.complete)
	c.eventually("nobody writes any more", func(context.Context) error {
		if quiet := c.store.quietFor(); quiet < 2*time.Second {
			return fmt.Errorf("quiet for %s", quiet)
		}
		return nil
	})

	changes := []struct {
		what    string
		members int
		do      func()
	}{
		{"a member joins", 4, func() { c.members = append(c.members, c.newMember(3)) }},
		{"a member leaves", 3, func() { c.members[3].stop() }},
		{"a member dies", 2, func() { c.members[2].kill() }},
	}
	for _, change := range changes {
		before, err := c.owned(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		revision, listed := c.store.revision(), len(listsOf(t, log))
		change.do()
		c.eventually(change.what, func(ctx context.Context) error { return c.settled(ctx, change.members) })
		after, err := c.owned(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		moved := 0
		for member, vns := range after {
			moved += vns.Minus(before[member]).Len()
		}
		if n := c.store.writesSince(revision); n != 0 {
			t.Errorf("%s: %d writes of Parents and Children, want none", change.what, n)
		}
		count := make(map[string]int)
		for _, l := range listsOf(t, log)[listed:] {
			count[l.resource] += l.virtualNodes
		}
		t.Logf("%s: %d Virtual Nodes moved, listed: %v", change.what, moved, count)
		if moved == 0 {
			t.Errorf("%s: nothing moved, so that nothing was tested", change.what)
		}
		for _, resource := range []string{"parents", "children"} {
			if count[resource] != moved {
				t.Errorf("%s: %s of %d Virtual Nodes were listed, and %d moved", change.what, resource, count[resource], moved)
			}
		}
	}
}

// A listing is one list that a member made.
type listing struct {
	resource     string
	virtualNodes int
}

// listsOf reads the members' lists from the API server's audit log. One that is not by Virtual Nodes is of all of them.
func listsOf(t *testing.T, log string) []listing {
	t.Helper()
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var found []listing
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e auditv1.Event
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			t.Fatalf("audit log: %v: %s", err, in.Text())
		}
		request, err := url.Parse(e.RequestURI)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(e.UserAgent, "parentchild/") || e.ResponseStatus.Code != http.StatusOK ||
			request.Query().Get("continue") != "" || !slices.Contains([]string{"parents", "children"}, e.ObjectRef.Resource) {
			continue
		}
		l := listing{e.ObjectRef.Resource, virtualNodes}
		if requirements, err := labels.ParseToRequirements(request.Query().Get("labelSelector")); err == nil {
			for _, r := range requirements {
				if r.Key() == sharding.LabelVirtualNode || r.Key() == sharding.LabelBucket {
					l.virtualNodes = r.Values().Len()
				}
			}
		}
		found = append(found, l)
	}
	if err := in.Err(); err != nil {
		t.Fatal(err)
	}
	return found
}
