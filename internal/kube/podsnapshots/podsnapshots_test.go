package podsnapshots

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// node is a Snapshots that records each call as OWNER CALL SECRET.
type node struct {
	Snapshots
	calls []string
	here  map[string]snapshot.Snapshot // snapshots on the node, by name
	tags  map[string]string            // digests in the registry, by ref
	fail  error                        // the error of the first Hibernate
	used  int                          // how many attempts to remove a snapshot fail because it is in use
}

func (n *node) note(ctx context.Context, auth snapshot.Auth, call ...string) {
	n.calls = append(n.calls, strings.TrimSpace(vm.Behalf(ctx).Namespace+" "+strings.Join(call, " ")+" "+auth.Token))
}

func (n *node) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	n.note(ctx, snapshot.Auth{}, "get", ref)
	if got, ok := n.here[ref]; ok {
		return got, nil
	}
	return snapshot.Snapshot{}, errdefs.NotFoundf("no snapshot %s", ref)
}

func (n *node) RemoveSnapshot(ctx context.Context, ref string) error {
	n.note(ctx, snapshot.Auth{}, "remove", ref)
	if n.used--; n.used >= 0 {
		return errdefs.Preconditionf("snapshot %s is in use", ref)
	}
	return nil
}

func (n *node) SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error) {
	n.note(ctx, snapshot.Auth{}, "save", ref, s.Name)
	return snapshot.Snapshot{ID: "saved", Name: s.Name, Labels: s.Labels}, nil
}

func (n *node) CloneWithImage(ctx context.Context, s vm.CloneSpec, _ []image.RegistryAuth) (vm.Record, error) {
	n.note(ctx, snapshot.Auth{}, "clone", s.Snapshot)
	return vm.Record{}, nil
}

func (n *node) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	n.note(ctx, snapshot.Auth{}, "hibernate", ref, name)
	err := n.fail
	n.fail = nil
	return vm.Record{}, err
}

func (n *node) Wake(ctx context.Context, ref string) (vm.Record, error) {
	n.note(ctx, snapshot.Auth{}, "wake", ref)
	return vm.Record{}, nil
}

func (n *node) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	n.note(ctx, auth, "push", ref, to)
	n.tags[to] = "sha256:pushed"
	return snapshot.Snapshot{Digest: "sha256:pushed"}, nil
}

func (n *node) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	n.note(ctx, auth, "pull", from, name)
	if strings.HasPrefix(from, snapshot.PeerScheme) {
		return snapshot.Snapshot{}, errdefs.NotFoundf("not on that node")
	}
	return snapshot.Snapshot{ID: "pulled", Digest: n.tags[from]}, nil
}

func (n *node) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	n.note(ctx, auth, "pull-early", from, name)
	return snapshot.Snapshot{ID: "pulled", Digest: n.tags[from], Arriving: true}, nil
}

func (n *node) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	n.note(ctx, auth, "ask", ref)
	if got := n.tags[ref]; got != "" {
		return got, nil
	}
	return "", errdefs.NotFoundf("no tag %s", ref)
}

func (n *node) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	n.note(ctx, auth, "delete", ref)
	return nil
}

func (n *node) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	n.note(ctx, auth, "check", ref)
	return nil
}

// Each call is on behalf of the pod's owner. The registry's secret goes to the registry only.
func TestCallsAreOnBehalfOfTheOwner(t *testing.T) {
	const (
		hibernate = "http://r/ns/web:hibernate"
		latest    = "http://r/ns/web:latest"
		fork      = "http://r/ns/web:fork"
		gold      = "http://r/ns/gold:v1"
		newer     = "http://r/ns/gold:v2"
	)
	forced := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{contract.KeyForcePull: "true"}}}
	rec := vm.Record{ID: "id", Spec: vm.Spec{Name: "web"}}
	for name, tc := range map[string]struct {
		do   func(context.Context, *States) error
		want []string
	}{
		"hibernate": {func(ctx context.Context, s *States) error {
			_, err := s.Hibernate(ctx, &rec)
			return errors.Join(s.Check(ctx), err)
		}, []string{"ns hibernate id web:hibernate", "ns remove web:hibernate", "ns hibernate id web:hibernate", "ns check " + hibernate + " secret"}},
		"wake on another node": {func(ctx context.Context, s *States) error {
			at, sleeps, err := s.FindHibernated(ctx, true)
			if err != nil || !sleeps {
				return errors.Join(err, errors.New("the VM is not hibernated"))
			}
			snap, err := s.Import(ctx, at)
			if err == nil {
				_, err = s.Clone(ctx, vm.CloneSpec{Snapshot: snap.ID}, nil)
			}
			return err
		}, []string{
			"ns get web:hibernate", "ns ask " + hibernate + " secret", "ns get web:hibernate", "ns get web-hibernate-import", "ns pull cocoon://peer:1/web:hibernate web-hibernate-import",
			"ns pull " + hibernate + " web-hibernate-import secret", "ns clone pulled",
		}},
		"clone what is nowhere here": {func(ctx context.Context, s *States) error {
			_, err := s.Stored(ctx, &corev1.Pod{}, contract.SnapshotRef{Repo: "gold", Tag: "v1"})
			return err
		}, []string{
			"ns get gold:v1", "ns get gold___:v1", "ns ask " + gold + " secret", "ns get gold:v1", "ns pull-early " + gold + " gold:v1 secret",
		}},
		"replace what is here": {func(ctx context.Context, s *States) error {
			_, err := s.Stored(ctx, forced, contract.SnapshotRef{Repo: "gold", Tag: "v2"})
			return err
		}, []string{
			"ns get gold:v2", "ns get gold___:v2", "ns ask " + newer + " secret", "ns get gold___:v2", "ns pull " + newer + " gold___:v2 secret", "ns remove older",
		}},
		"keep": {func(ctx context.Context, s *States) error {
			_, err := s.Keep(ctx, &vm.Record{ID: "id", Snapshot: "slept"})
			return errors.Join(err, s.DropKept(ctx, true))
		}, []string{
			"ns save id web:hibernate", "ns get slept", "ns push slept " + hibernate + " secret", "ns ask " + hibernate + " secret", "ns get web:hibernate",
		}},
		"save": {func(ctx context.Context, s *States) error {
			_, err := s.SaveAway(ctx, rec)
			return err
		}, []string{
			"ns check " + latest + " secret", "ns get web", "ns get web:latest", "ns save id web", "ns push saved " + latest + " secret",
			"ns ask " + latest + " secret", "ns remove saved",
		}},
		"offer": {
			func(ctx context.Context, s *States) error { return s.Offer(ctx, &corev1.Pod{}) },
			[]string{"ns get fork-web", "ns save id fork-web", "ns push saved " + fork + " secret", "ns ask " + fork + " secret"},
		},
		"drop": {func(ctx context.Context, s *States) error {
			s.DropTag(ctx)
			s.DropOffer(ctx)
			s.DropFork(ctx, "web")
			_, err := s.Wake(ctx, &rec)
			return err
		}, []string{"ns delete " + hibernate + " secret", "ns delete " + fork + " secret", "ns remove fork-web", "ns get", "ns wake id"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := &node{
				tags: map[string]string{hibernate: "sha256:there", gold: "sha256:gold", newer: "sha256:newer"}, fail: errdefs.Existsf("the snapshot exists"),
				here: map[string]snapshot.Snapshot{"slept": {ID: "slept"}, "gold:v2": {ID: "older", Name: "gold:v2", Digest: "sha256:older", Owner: vm.Owner{Namespace: "ns"}}},
			}
			store := New("node-1", n, Registry{URL: "http://r/", Auth: snapshot.Auth{Token: "secret"}, Peers: []string{"peer:1"}},
				Metrics{func(time.Duration) {}, func(time.Duration, error) {}, func(time.Duration, error) {}})
			s := store.States(Owner{
				Owner: vm.Owner{Namespace: "ns"}, Pod: "web", VM: "web", Log: slog.New(slog.DiscardHandler),
				Find:     func(context.Context, string) (vm.Record, error) { return rec, nil },
				Forkable: func(vm.Record) bool { return true },
				Pulling:  func(string) func(snapshot.Snapshot) { return func(snapshot.Snapshot) {} },
			})
			if err := tc.do(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(n.calls, tc.want) {
				t.Errorf("calls\n%s\nwant\n%s", strings.Join(n.calls, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// saveLatest removes a snapshot that has one of its two names only if the node has taken that snapshot.
func TestSaveLatestKeepsOthersSnapshots(t *testing.T) {
	mine := map[string]string{contract.VMLabelNode: "node-1"}
	early, late := time.Unix(1, 0), time.Unix(2, 0)
	for name, tc := range map[string]struct {
		first, second snapshot.Snapshot
		want          string // name of the new snapshot; "": refused
	}{
		"no snapshot":               {snapshot.Snapshot{}, snapshot.Snapshot{}, "web"},
		"first name used":           {snapshot.Snapshot{ID: "1", Name: "web"}, snapshot.Snapshot{}, "web:latest"},
		"second name used":          {snapshot.Snapshot{}, snapshot.Snapshot{ID: "2", Name: "web:latest"}, "web"},
		"both used, first older":    {snapshot.Snapshot{ID: "1", Name: "web", CreatedAt: early, Labels: mine}, snapshot.Snapshot{ID: "2", Name: "web:latest", CreatedAt: late}, "web"},
		"both used, second older":   {snapshot.Snapshot{ID: "1", Name: "web", CreatedAt: late}, snapshot.Snapshot{ID: "2", Name: "web:latest", CreatedAt: early, Labels: mine}, "web:latest"},
		"both used, older not ours": {snapshot.Snapshot{ID: "1", Name: "web", CreatedAt: early}, snapshot.Snapshot{ID: "2", Name: "web:latest", CreatedAt: late, Labels: mine}, ""},
	} {
		n := &node{here: map[string]snapshot.Snapshot{}}
		for _, s := range []snapshot.Snapshot{tc.first, tc.second} {
			if s.ID != "" {
				n.here[s.Name] = s
			}
		}
		s := New("node-1", n, Registry{}, Metrics{Saved: func(time.Duration) {}}).States(Owner{Log: slog.New(slog.DiscardHandler)})
		got, _, err := s.saveLatest(t.Context(), vm.Record{ID: "id"}, contract.SnapshotRef{Repo: "web", Tag: "latest"})
		if got.Name != tc.want || (err == nil) != (tc.want != "") || err == nil && !ours(got) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// A snapshot that another operation reads is removed when that operation has ended. It stays if the operation takes too long.
func TestSnapshotInUseIsDiscardedLater(t *testing.T) {
	for used, want := range map[int]int{0: 1, 3: 4, 1000: whileInUse.Steps} {
		synctest.Test(t, func(t *testing.T) {
			n := &node{used: used}
			New("node-1", n, Registry{}, Metrics{}).States(Owner{Log: slog.New(slog.DiscardHandler)}).discard(t.Context(), "x")
			if len(n.calls) != want {
				t.Errorf("in use %d times: %d attempts, want %d", used, len(n.calls), want)
			}
		})
	}
}

// The state of a VM with claims stays on its node, and such a VM is not saved for others.
func TestStateOfAVMWithClaimsStaysHere(t *testing.T) {
	n := &node{tags: map[string]string{}, here: map[string]snapshot.Snapshot{"asleep": {ID: "asleep"}}}
	s := New("node-1", n, Registry{URL: "http://r/"}, Metrics{Saved: func(time.Duration) {}, Pushed: func(time.Duration, error) {}}).
		States(Owner{VM: "db", Log: slog.New(slog.DiscardHandler)})
	rec := vm.Record{ID: "id", State: vm.StateHibernated, Snapshot: "asleep", Attached: []vm.AttachedVolume{{Volume: "data"}}}
	if err := s.PushHibernated(t.Context(), &rec); err != nil || len(n.calls) > 0 {
		t.Errorf("hibernated: %v, calls %q", err, n.calls)
	}
	if _, err := s.save(t.Context(), rec, "gold", ""); !errdefs.IsFailedPrecondition(err) || len(n.calls) > 0 {
		t.Errorf("saved: %v, calls %q", err, n.calls)
	}
	rec.Attached = nil
	if err := s.PushHibernated(t.Context(), &rec); err != nil || len(n.calls) == 0 {
		t.Errorf("without claims: %v, calls %q", err, n.calls)
	}
}
