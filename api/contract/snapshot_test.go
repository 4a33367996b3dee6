package contract

import (
	"maps"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestSlotOf(t *testing.T) {
	for name, want := range map[string]int{
		"vk-ns-set-0": 0, "vk-ns-set-12": 12,
		"vk-ns-set": -1, "vk-ns-set-": -1, "vk-ns-set-00": -1, "vk-ns-set-x": -1, "vk-ns-set-x-0": -1, "vk-ns-set--1": -1, "vk-ns-set-+1": -1,
		"vk-ns-other-0": -1, "x-0": -1, "": -1, "vk-ns-set-99999999999999999999": -1,
	} {
		if got := SlotOf("ns", "set", name); got != want {
			t.Errorf("slot of %q is %d, want %d", name, got, want)
		}
	}
}

func TestWhoIsSavedBeforeItGoes(t *testing.T) {
	owned := Member{Namespace: "ns", Owners: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "x"}, {Kind: OwnerKind, Name: "set"}}}
	labelled := Member{Namespace: "ns", Labels: map[string]string{LabelSetName: "set"}}
	toolbox := Member{Namespace: "ns", Labels: map[string]string{LabelSetName: "set", LabelSetRole: RoleToolbox}}
	for _, tc := range []struct {
		policy SnapshotPolicy
		member Member
		name   string
		want   bool
	}{
		{SnapshotAlways, Member{}, "anything", true},
		{"", Member{}, "anything", true},
		{SnapshotNever, owned, "vk-ns-set-0", false},
		{SnapshotMainOnly, owned, "vk-ns-set-0", true},
		{SnapshotMainOnly, labelled, "vk-ns-set-0", true},
		{SnapshotMainOnly, owned, "vk-ns-set-1", false},
		{SnapshotMainOnly, owned, "vk-ns-set-x-0", false}, // a toolbox called x-0
		{SnapshotMainOnly, toolbox, "vk-ns-set-0", false},
		{SnapshotMainOnly, Member{Namespace: "ns"}, "vk-ns-set-0", false}, // a pod without a set
		{SnapshotMainOnly, Member{Namespace: "other", Owners: owned.Owners}, "vk-ns-set-0", false},
	} {
		if got := ShouldSnapshotVM(VMSpec{SnapshotPolicy: tc.policy}, tc.member.Main(tc.name)); got != tc.want {
			t.Errorf("%q of %+v named %s: %v", tc.policy, tc.member, tc.name, got)
		}
	}
	for text, want := range map[string]bool{"": false, KeyName: false, KeyManaged: true, KeySnapshotPolicy: true} {
		if got := AsksSnapshot(map[string]string{text: "true"}); got != want {
			t.Errorf("with %q: %v", text, got)
		}
	}
}

func TestSnapshotRefs(t *testing.T) {
	for in, want := range map[string]struct{ ref, local string }{
		"base":              {"base:latest", "base"},
		"base:latest":       {"base:latest", "base"},
		"base:v2":           {"base:v2", "base:v2"},
		"team/base":         {"team/base:latest", "team___base"},
		"vk-ns-a-0":         {"vk-ns-a-0:latest", "vk-ns-a-0"},
		"vk-ns-a:hibernate": {"vk-ns-a:hibernate", "vk-ns-a:hibernate"},
	} {
		got, err := ParseSnapshotRef(in)
		if err != nil || got.String() != want.ref || got.Local() != want.local || got.Locals()[0] != want.local {
			t.Errorf("%q: %+v %q, %v", in, got, got.Local(), err)
		}
	}
	if got := (SnapshotRef{Repo: "base", Tag: "latest"}).Locals(); len(got) != 2 || got[1] != "base:latest" {
		t.Errorf("names of base: %v", got)
	}
	for in, why := range map[string]string{
		"": "not a snapshot's name", ":": "not", ":v1": "not", "base:": "not", "/base": "not", "a//b": "not", "base:v 1": "not",
		"localhost:5000/base": "names a host", "base@sha256:" + strings.Repeat("a", 64): "digest", "http://x/base": "URL",
		"../base": "not", strings.Repeat("a", 128): "too long", "a\nb": "not",
	} {
		if _, err := ParseSnapshotRef(in); err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), KeyImage) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestPushable(t *testing.T) {
	for name, want := range map[string]bool{"vk-ns-web": true, "a.b-c__d": true, "Web": false, "a-": false, "a___b": false, "a.-b": false, "": false} {
		if got := Pushable(name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}

func TestLifecycle(t *testing.T) {
	m := map[string]string{"other": "kept"}
	want := Lifecycle{State: LifecycleHibernated, Observed: "7", Message: "slept"}
	want.Apply(m)
	if got, err := ParseLifecycle(m); err != nil {
		t.Errorf("read back: %v", err)
	} else if d := diff.Of(want, got); d != "" {
		t.Errorf("read back: %s", d)
	}
	Lifecycle{}.Apply(m)
	if !maps.Equal(m, map[string]string{"other": "kept"}) {
		t.Errorf("clearing left %v", m)
	}
	if got, err := ParseLifecycle(map[string]string{KeyLifecycleState: "dead", KeyLifecycleObserved: "x"}); err == nil || got != (Lifecycle{}) {
		t.Errorf("%+v, %v", got, err)
	}
	if Generation(map[string]string{KeyGeneration: "12"}) != "12" || Generation(map[string]string{KeyGeneration: "-1"}) != "" || Generation(nil) != "" {
		t.Error("generations are misread")
	}
	if LifecycleCreating.Settled() || !LifecycleFailed.Settled() {
		t.Error("settled states are misjudged")
	}
	if !RestoreFromHibernate(map[string]string{KeyRestoreFromHibernate: "true"}) || !KeepSnapshot(map[string]string{KeyKeepSnapshot: "true"}) || KeepSnapshot(nil) {
		t.Error("marks are misread")
	}
}

// Any accepted ref must keep its meaning when it is parsed again, and must be usable as a name on a node.
func FuzzSnapshotRef(f *testing.F) {
	for _, s := range []string{"base", "team/base:v1", "a:b:c", "h:5000/x", "x@sha256:0", "::", "a/../b", "a___b"} {
		f.Add(s, "7")
	}
	f.Fuzz(func(t *testing.T, s, generation string) {
		in := map[string]string{KeyLifecycleObserved: generation, KeyLifecycleState: s}
		l, _ := ParseLifecycle(in)
		out := map[string]string{}
		l.Apply(out)
		if again, err := ParseLifecycle(out); err != nil {
			t.Fatalf("%+v: %v", l, err)
		} else if d := diff.Of(l, again); d != "" {
			t.Fatalf("read back: %s", d)
		}
		SlotOf(generation, s, VMName(generation, s)+"-0")
		ref, err := ParseSnapshotRef(s)
		if err != nil {
			return
		}
		again, err := ParseSnapshotRef(ref.String())
		if d := diff.Of(ref, again); err != nil || d != "" {
			t.Fatalf("%q, read twice: %v, %s", s, err, d)
		}
		if local := ref.Local(); len(local) > maxLocalName || strings.ContainsAny(local, "/@ \n") {
			t.Fatalf("%q cannot be a name on a node", local)
		}
	})
}
