package autoscaler

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"gocloud.dev/blob/memblob"

	"github.com/drover-sh/drover/autoscaler/provider"
)

// killer ends the process at its at-th step: a write to the store or a call of the provider. landed says whether the
// step still takes effect. A dead process does nothing any more.
type killer struct {
	mu        sync.Mutex // writes to the store come concurrently
	at, steps int
	landed    bool
	dead      bool
}

func (k *killer) step(effect func() error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dead {
		return errCrash
	}
	k.steps++
	if k.steps != k.at {
		return effect()
	}
	k.dead = true
	if k.landed {
		_ = effect()
	}
	return errCrash
}

type mortalStore struct {
	Store
	k *killer
}

func (s mortalStore) SaveRollUp(ctx context.Context, r *RollUp) error {
	return s.k.step(func() error { return s.Store.SaveRollUp(ctx, r) })
}

func (s mortalStore) SaveRecord(ctx context.Context, r *Record) error {
	return s.k.step(func() error { return s.Store.SaveRecord(ctx, r) })
}

type mortalProvider struct {
	provider.Interface
	k *killer
}

func (p mortalProvider) Launch(ctx context.Context, r provider.Request) error {
	return p.k.step(func() error { return p.Interface.Launch(ctx, r) })
}

func (p mortalProvider) Terminate(ctx context.Context, r provider.Ref) error {
	return p.k.step(func() error { return p.Interface.Terminate(ctx, r) })
}

// TestAKillAtAnyStepIsHarmless plays one story over and over, and kills the process at another step each time: nothing
// is launched twice, nothing is left behind, and the story ends as it does without a kill.
func TestAKillAtAnyStepIsHarmless(t *testing.T) {
	for _, landed := range []bool{false, true} {
		total := 1
		for at := 1; at <= total; at++ {
			k := &killer{at: at, landed: landed}
			w := newWorld(t, testPolicy(), small(100))
			durable := w.store
			w.store = mortalStore{durable, k}
			w.wrap = func(p provider.Interface) provider.Interface { return mortalProvider{p, k} }
			w.start()
			w.operator("east").slow = false
			w.cloud.Latency = 3 * time.Second
			w.onTurn = func() {
				if k.dead {
					k.dead = false
					w.start()
				}
			}
			w.demand("east", cpuNeed(10, 6))
			w.advance(100 * time.Second)
			w.demand("east", cpuNeed(10, 4))
			w.advance(10 * time.Second)
			w.demand("east", cpuNeed(10, 5))
			w.advance(4 * time.Minute)
			if got := fmt.Sprint(w.states("east")); got != fmt.Sprint(states{Active: 5}) || len(w.cloud.Machines()) != 5 {
				t.Fatalf("killed at step %d (landed %v): %s and %d machines in the cloud, want 5 active\n%s", at, landed, got,
					len(w.cloud.Machines()), strings.Join(w.notes, "\n"))
			}
			if got := w.cloud.Launched(); len(got) != 6 {
				t.Fatalf("killed at step %d (landed %v): launched %v, want 6 machines", at, landed, got)
			}
			if at == 1 {
				total = k.steps
			}
		}
		if total < 15 {
			t.Errorf("the story has only %d steps", total)
		}
	}
}

// TestAStoreThatDoesNotTakeWritesStopsEverything: nothing is acknowledged or launched that is not stored.
func TestAStoreThatDoesNotTakeWritesStopsEverything(t *testing.T) {
	w := newWorld(t, testPolicy(), small(100))
	k := &killer{dead: true}
	w.store = mortalStore{w.store, k}
	w.start()
	w.demand("east", cpuNeed(10, 2))
	w.advance(20 * time.Second)
	if got := len(w.cloud.Launched()); got != 0 {
		t.Errorf("launched %d machines that are not recorded", got)
	}
	k.dead = false
	w.advance(20 * time.Second)
	w.want("east", states{Active: 2})
}

func TestACorruptObjectIsNamed(t *testing.T) {
	good := newWorld(t, testPolicy(), small(100))
	good.active("east", 1)
	ctx := t.Context()
	for _, key := range []string{"v1/machines/east.json", "v1/rollups/east.json"} {
		for name, content := range map[string]string{"half": `{"version":1,`, "other": `{"version":7,"needs":[{"count":-1}]}`} {
			t.Run(key+" "+name, func(t *testing.T) {
				bucket := memblob.OpenBucket(nil)
				defer func() { _ = bucket.Close() }()
				if err := bucket.WriteAll(ctx, key, []byte(content), nil); err != nil {
					t.Fatal(err)
				}
				_, err := NewStore(bucket).Load(ctx)
				if err == nil || !strings.Contains(err.Error(), key) {
					t.Errorf("got error %v, want one that names %s", err, key)
				}
			})
		}
	}
}

func TestADirectoryKeepsWhatWasStored(t *testing.T) {
	ctx := t.Context()
	address := "file://" + t.TempDir() + "/state"
	w := newWorld(t, testPolicy(), small(100))
	open := func() *BlobStore {
		store, err := OpenStore(ctx, address)
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
	store := open()
	w.store = store
	w.start()
	w.demand("a cluster: west", cpuNeed(10, 3))
	w.advance(65 * time.Second)
	// What a write left behind that a kill interrupted is no object.
	if err := store.bucket.WriteAll(ctx, "v1/machines/fileblob123456", []byte("half"), nil); err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	store = open()
	defer func() { _ = store.Close() }()
	w.store = store
	w.start()
	w.want("a cluster: west", states{Active: 3})
	w.advance(5 * time.Minute)
	w.want("a cluster: west", states{Active: 3})
	if got := len(w.cloud.Launched()); got != 3 {
		t.Errorf("launched %d machines, want 3", got)
	}
	var record bytes.Buffer
	if err := store.bucket.Download(ctx, objectKey(recordPrefix, "a cluster: west"), &record, nil); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(record.String(), `"offering":"small"`); n != 1 {
		t.Errorf("the record repeats the shape %d times", n)
	}
}
