package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1alpha1 "github.com/drover-sh/drover/examples/parentchild/api/v1alpha1"
)

// users create, change and delete Parents, and now and then a Child. No name is used twice: an object that is read as
// missing has not come back.
type users struct {
	c      *cluster
	random *rand.Rand

	mu    sync.Mutex
	names []string
	next  int
}

func newUsers(c *cluster, seed uint64) *users {
	return &users{c: c, random: rand.New(rand.NewPCG(seed, 2))}
}

// create makes n Parents at once.
func (u *users) create(n int) {
	u.c.t.Helper()
	group, ctx := errgroup.WithContext(u.c.t.Context())
	group.SetLimit(16)
	for range n {
		group.Go(func() error { return u.createOne(ctx) })
	}
	if err := group.Wait(); err != nil {
		u.c.t.Fatal(err)
	}
}

func (u *users) createOne(ctx context.Context) error {
	u.mu.Lock()
	name := fmt.Sprintf("parent-%06d", u.next)
	u.next++
	u.mu.Unlock()
	p := &v1alpha1.Parent{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1alpha1.ParentSpec{Value: "0"}}
	if err := u.c.client.Create(ctx, p); err != nil {
		return err
	}
	u.mu.Lock()
	u.names = append(u.names, name)
	u.mu.Unlock()
	return nil
}

// run does something every so often until ctx ends. What fails, because the API server is away, is not tried again.
func (u *users) run(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		request, cancel := context.WithTimeout(ctx, 5*time.Second)
		u.act(request, n)
		cancel()
	}
}

func (u *users) act(ctx context.Context, n int) {
	dice := u.random.IntN(10)
	if dice < 2 || len(u.names) == 0 {
		_ = u.createOne(ctx)
		return
	}
	i := u.random.IntN(len(u.names))
	name := u.names[i]
	key := client.ObjectKey{Namespace: namespace, Name: name}
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	switch {
	case dice < 4:
		if err := u.c.client.Delete(ctx, &v1alpha1.Parent{ObjectMeta: meta}); err == nil {
			u.names = append(u.names[:i], u.names[i+1:]...)
		}
	case dice < 5:
		_ = u.c.client.Delete(ctx, &v1alpha1.Child{ObjectMeta: meta})
	default:
		_ = retry.RetryOnConflict(retry.DefaultRetry, func() error {
			var p v1alpha1.Parent
			if err := u.c.client.Get(ctx, key, &p); err != nil {
				return err
			}
			before := p.DeepCopy()
			p.Spec.Value = fmt.Sprint(n)
			return u.c.client.Patch(ctx, &p, client.MergeFrom(before))
		})
	}
}

// hurry changes one Parent after the other, a few at a time, as fast as the API server lets it, until ctx ends.
func (u *users) hurry(ctx context.Context) {
	const atATime = 4
	var wait sync.WaitGroup
	for first := range atATime {
		wait.Go(func() {
			for n := first; ctx.Err() == nil; n += atATime {
				p := &v1alpha1.Parent{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: u.names[n%len(u.names)]}}
				patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"value":"hurry %d"}}`, n))
				_ = u.c.client.Patch(ctx, p, patch)
			}
		})
	}
	wait.Wait()
}

// complete complains while a Parent has not exactly one Child with its value, or a Child not its Parent.
func (c *cluster) complete(ctx context.Context) error {
	var ps v1alpha1.ParentList
	var cs v1alpha1.ChildList
	if err := c.client.List(ctx, &ps); err != nil {
		return err
	}
	if err := c.client.List(ctx, &cs); err != nil {
		return err
	}
	of := make(map[string][]*v1alpha1.Child)
	for i := range cs.Items {
		owner := metav1.GetControllerOf(&cs.Items[i])
		if owner == nil {
			return fmt.Errorf("child %s has no owner", cs.Items[i].Name)
		}
		of[string(owner.UID)] = append(of[string(owner.UID)], &cs.Items[i])
	}
	var wrong []string
	for i := range ps.Items {
		p := &ps.Items[i]
		switch own := of[string(p.UID)]; {
		case len(own) != 1:
			wrong = append(wrong, fmt.Sprintf("%s (VN %q) has %d children", p.Name, p.Labels["loadbalance.k8s.io/vn"], len(own)))
		case own[0].Spec.Value != p.Spec.Value:
			wrong = append(wrong, fmt.Sprintf("%s has value %q, its child %q", p.Name, p.Spec.Value, own[0].Spec.Value))
		}
		delete(of, string(p.UID))
	}
	for _, orphans := range of {
		wrong = append(wrong, orphans[0].Name+" is a child without its parent")
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%d of %d parents and %d children: %s, …", len(wrong), len(ps.Items), len(cs.Items), wrong[0])
	}
	return nil
}
