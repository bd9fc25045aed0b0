package chaos

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
	"github.com/drover-sh/drover/examples/parentchild/recording"
	"github.com/drover-sh/drover/sharding"
	"github.com/drover-sh/drover/sharding/wire"
)

const (
	parents  = sharding.Resource("parents.parentchild.drover.sh")
	children = sharding.Resource("children.parentchild.drover.sh")
)

// A store watches etcd, below the API server: whatever happens to that, nothing that lands is missed.
type store struct {
	mu       sync.Mutex
	landings []recording.Landing
	last     time.Time // of a change of a Parent or Child
	fault    error
}

func watchStore(t *testing.T, url string) *store {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{url}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s := &store{last: time.Now()}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	events := c.Watch(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithCreatedNotify())
	if first := <-events; first.Err() != nil || !first.Created {
		t.Fatalf("watching etcd: %v", first.Err())
	}
	go func() {
		for batch := range events {
			s.take(batch)
		}
	}()
	return s
}

func (s *store) take(batch clientv3.WatchResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := batch.Err(); err != nil && s.fault == nil {
		s.fault = fmt.Errorf("watching etcd: %w", err)
	}
	for _, e := range batch.Events {
		l, ok, err := landingOf(e)
		if err != nil && s.fault == nil {
			s.fault = fmt.Errorf("%s: %w", e.Kv.Key, err)
		}
		if !ok {
			continue
		}
		l.Seen = recording.Now()
		if l.Object != nil {
			s.last = time.Now()
		}
		s.landings = append(s.landings, l)
	}
}

// all returns what has landed so far.
func (s *store) all() ([]recording.Landing, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.landings), s.fault
}

// quietFor is how long nothing has happened to Parents and Children.
func (s *store) quietFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.last)
}

// revision is that of the last landing.
func (s *store) revision() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.landings) == 0 {
		return 0
	}
	return s.landings[len(s.landings)-1].Revision
}

// revisionAt is that of the last landing that had been seen by then, 0 if there was none.
func (s *store) revisionAt(then time.Duration) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, _ := slices.BinarySearchFunc(s.landings, then, func(l recording.Landing, then time.Duration) int {
		if l.Seen <= then {
			return -1
		}
		return 1
	})
	if i == 0 {
		return 0
	}
	return s.landings[i-1].Revision
}

// writesSince counts the landings of Parents and Children after a revision.
func (s *store) writesSince(revision int64) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.landings {
		if l.Object != nil && l.Revision > revision {
			n++
		}
	}
	return n
}

// landingOf reads one event; ok is false if it is about nothing that matters here.
func landingOf(e *clientv3.Event) (l recording.Landing, ok bool, err error) {
	key := strings.TrimPrefix(string(e.Kv.Key), "/registry/")
	value := e.Kv.Value
	l.Revision, l.Created, l.Deleted = e.Kv.ModRevision, e.IsCreate(), e.Type == mvccpb.DELETE
	if l.Deleted && e.PrevKv != nil {
		value = e.PrevKv.Value
	}
	switch prefix, name, _ := strings.Cut(key, "/"); {
	case prefix == "leases":
		l.Resource, l.Name = "leases.coordination.k8s.io", name
		if !strings.HasPrefix(name, namespace+"/"+groupName+".") {
			return l, true, nil
		}
		l.Lease, err = leaseOf(value)
	case prefix == "configmaps":
		l.Resource, l.Name = "configmaps", name
	case strings.HasPrefix(key, lbv1alpha1.GroupName+"/virtualnodeslices/"):
		l.Resource, l.Name = "virtualnodeslices.loadbalance.k8s.io", strings.TrimPrefix(name, "virtualnodeslices/")
		l.Slice, err = sliceOf(value, e.Kv.ModRevision)
	case prefix == v1alpha1.GroupVersion.Group:
		plural, object, _ := strings.Cut(name, "/")
		l.Resource, l.Name = sharding.Resource(plural+"."+prefix), object
		if l.Resource == parents || l.Resource == children {
			l.Object, err = objectOf(value)
		}
	default:
		return l, false, nil
	}
	return l, err == nil, err
}

func leaseOf(value []byte) (*recording.Lease, error) {
	o, _, err := clientgoscheme.Codecs.UniversalDeserializer().Decode(value, nil, nil)
	if err != nil {
		return nil, err
	}
	lease, ok := o.(*coordinationv1.Lease)
	if !ok {
		return nil, fmt.Errorf("%T is not a Lease", o)
	}
	return &recording.Lease{Holder: ptr.Deref(lease.Spec.HolderIdentity, "")}, nil
}

func sliceOf(value []byte, revision int64) (*sharding.Slice, error) {
	o := &lbv1alpha1.VirtualNodeSlice{}
	if err := json.Unmarshal(value, o); err != nil {
		return nil, err
	}
	o.ResourceVersion = fmt.Sprint(revision)
	s, err := wire.Slice(o)
	return &s, err
}

// objectOf reads a Parent or a Child. The hash key of both is the Parent's.
func objectOf(value []byte) (*recording.Object, error) {
	var o struct {
		metav1.PartialObjectMetadata `json:",inline"`
		Spec                         json.RawMessage `json:"spec"`
	}
	if err := json.Unmarshal(value, &o); err != nil {
		return nil, err
	}
	root := sharding.ObjectRef{
		Group: v1alpha1.GroupVersion.Group, Kind: "Parent", Namespace: o.Namespace, Name: o.Name,
	}
	var uid string
	if owner := metav1.GetControllerOf(&o); owner != nil {
		root.Name, uid = owner.Name, string(owner.UID)
	}
	sum := sha256.Sum256([]byte(uid + string(o.Spec)))
	found := &recording.Object{
		VN: sharding.VirtualNodeOf(root.Key(), virtualNodes), Digest: hex.EncodeToString(sum[:8]),
	}
	if label, ok := o.Labels[sharding.LabelVirtualNode]; ok {
		vn, err := sharding.ParseVirtualNode(label, virtualNodes)
		if err != nil {
			return nil, err
		}
		found.VN, found.Labelled = vn, true
	}
	return found, nil
}
