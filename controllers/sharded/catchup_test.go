package sharded

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestACacheHasCaughtUpWhenItShowsWhatStood(t *testing.T) {
	type objects map[types.UID]string // versions
	for name, c := range map[string]struct {
		first, again objects // as listed; again: nil where there is no second list
		at           string  // the version of the first list
		looks        []objects
		want         bool
	}{
		"an empty kind":               {first: objects{}, at: "9", looks: []objects{{}}, want: true},
		"all as it stood":             {first: objects{"a": "3", "b": "8"}, at: "9", looks: []objects{{"a": "3", "b": "8"}}, want: true},
		"newer":                       {first: objects{"a": "3"}, at: "9", looks: []objects{{"a": "12"}}, want: true},
		"one is older":                {first: objects{"a": "3", "b": "8"}, at: "9", looks: []objects{{"a": "3", "b": "7"}}},
		"one is missing":              {first: objects{"a": "3", "b": "8"}, at: "9", looks: []objects{{"a": "3"}}},
		"one is gone, but shown":      {first: objects{"a": "3"}, at: "9", looks: []objects{{"a": "3", "b": "8"}}},
		"one came after":              {first: objects{"a": "3"}, at: "9", looks: []objects{{"a": "3", "b": "10"}}, want: true},
		"each was shown at its time":  {first: objects{"a": "3", "b": "8"}, at: "9", looks: []objects{{"a": "3", "b": "7"}, {"b": "9"}}, want: true},
		"what is missing is gone":     {first: objects{"a": "3", "b": "8"}, again: objects{"a": "11"}, at: "9", looks: []objects{{"a": "3"}}, want: true},
		"a second list asks no more":  {first: objects{"a": "3"}, again: objects{"a": "30", "c": "31"}, at: "9", looks: []objects{{"a": "3"}}, want: true},
		"versions compare by number":  {first: objects{"a": "10"}, at: "10", looks: []objects{{"a": "9"}}},
		"what is gone since is shown": {first: objects{"a": "3"}, again: objects{}, at: "9", looks: []objects{{"a": "3"}}},
	} {
		t.Run(name, func(t *testing.T) {
			a := &awaited{}
			list := func(o objects, at string) {
				l := &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{ResourceVersion: at}}
				for uid, v := range o {
					l.Items = append(l.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: v}})
				}
				a.listed(l)
			}
			list(c.first, c.at)
			if c.again != nil {
				list(c.again, "99")
			}
			for _, look := range c.looks {
				var shown []metav1.Object
				for uid, v := range look {
					shown = append(shown, &metav1.ObjectMeta{UID: uid, ResourceVersion: v})
				}
				if err := a.shown(shown); err != nil {
					t.Fatal(err)
				}
			}
			if a.done != c.want {
				t.Errorf("caught up: %t, expected %t", a.done, c.want)
			}
		})
	}
}

// laggard is a cache that shows what it was shown last.
type laggard struct {
	client.Reader
	list corev1.ConfigMapList
}

func (l *laggard) List(_ context.Context, out client.ObjectList, _ ...client.ListOption) error {
	l.list.DeepCopyInto(out.(*corev1.ConfigMapList))
	return nil
}

func TestCatchUpWaitsForWhatAnotherHasWritten(t *testing.T) {
	w := newWorld(t)
	write := func(name string, n int) {
		t.Helper()
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
		if n == 0 {
			if err := w.c.Create(t.Context(), cm); err != nil {
				t.Fatal(err)
			}
		}
		before := cm.DeepCopy()
		cm.Data = map[string]string{"n": fmt.Sprint(n)}
		if err := w.c.Patch(t.Context(), cm, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	cached := &laggard{}
	see := func() {
		t.Helper()
		if err := w.c.List(t.Context(), &cached.list, client.InNamespace(w.ns)); err != nil {
			t.Fatal(err)
		}
	}
	write("a", 0)
	write("b", 0)
	see()
	write("b", 1) // by the owner before
	now := time.Unix(0, 0)
	c := NewCatchUp(testScheme(), w.c, cached, Scope{List: &corev1.ConfigMapList{}, Options: []client.ListOption{client.InNamespace(w.ns)}})
	c.now = func() time.Time { now = now.Add(time.Second); return now }
	done := func(want bool, when string) {
		t.Helper()
		if got, err := c.Done(t.Context()); err != nil || got != want {
			t.Fatalf("%s: caught up: %t, %v; expected %t", when, got, err, want)
		}
	}
	done(false, "the cache is behind")
	write("a", 2) // whatever is written later is not waited for
	done(false, "the cache is still behind")
	a := cached.list.Items[0].DeepCopy()
	see()
	cached.list.Items[0] = *a
	done(true, "the cache shows b")
	done(true, "for good")
}
