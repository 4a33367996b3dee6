package jail_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func groupName() string { return "cocoon-jail-" + strconv.Itoa(os.Getpid()) }

// testJail is one whose cgroups belong to this test alone. The mark of its processes is their name.
func testJail(t *testing.T) *jail.Jail {
	t.Helper()
	return jailOf(t, func(args []string) string { return args[0] })
}

func jailOf(t *testing.T, mark func(args []string) string) *jail.Jail {
	t.Helper()
	users, err := jail.NewUsers(jail.DefaultUIDBase, jail.DefaultUIDCount)
	if err != nil {
		t.Fatal(err)
	}
	j, err := jail.New(jail.Config{
		Users: users, Cgroup: groupName(), LogLimit: 4096, Sockets: []string{"a.sock"}, Mark: mark,
	}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func sleeper(t *testing.T, s proc.Spec) *proc.Process {
	t.Helper()
	s.Path = "/bin/sleep"
	if s.Args == nil {
		s.Args = []string{"sleep"}
	}
	s.Args = append(s.Args, "600")
	child, err := proc.Start(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(child.Kill(context.Background()), child.Close()) })
	return child
}

func TestJailIsChecked(t *testing.T) {
	for _, cfg := range []jail.Config{{Cgroup: "a/b", LogLimit: 4096}, {Cgroup: "..", LogLimit: 4096}, {Cgroup: "a", LogLimit: 5}} {
		if _, err := jail.New(cfg, slog.New(slog.DiscardHandler)); !errdefs.IsInvalid(err) {
			t.Errorf("New(%+v): %v", cfg, err)
		}
	}
}

// TestReapByMark ends processes that no cgroup knows: those of our users that have the mark, and no others.
func TestReapByMark(t *testing.T) {
	need.Root(t)
	j, id, dir := testJail(t), vm.NewID(), t.TempDir()
	uid, err := j.Users.Take(id)
	if err != nil {
		t.Fatal(err)
	}
	mark := []string{jail.UUID(id)}
	ours := sleeper(t, proc.Spec{Args: mark, User: &proc.User{UID: uid, GID: uid}})
	foreign := sleeper(t, proc.Spec{Args: mark})
	other := sleeper(t, proc.Spec{Args: []string{jail.UUID(vm.NewID())}, User: &proc.User{UID: uid, GID: uid}})
	if err := os.WriteFile(filepath.Join(dir, "a.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := j.Seek(t.Context(), []vm.ID{id, vm.NewID()})
	if err != nil || len(found) != 1 || len(found[id]) != 1 || found[id][0] != ours.PID() {
		t.Errorf("Seek = %v, %v; want %d", found, err, ours.PID())
	}
	for range 2 {
		if err := j.Reap(t.Context(), id, dir); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ours.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	for _, p := range []*proc.Process{foreign, other} {
		if err := p.Signal(0); err != nil {
			t.Errorf("process %d, which is not ours, was ended: %v", p.PID(), err)
		}
	}
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestArgumentsOfOthers: the arguments of a process that has none of our users are not read, so nobody waits for one that hides them.
func TestArgumentsOfOthers(t *testing.T) {
	need.Root(t)
	id, seen := vm.NewID(), 0
	other := sleeper(t, proc.Spec{Args: []string{jail.UUID(id)}})
	j := jailOf(t, func(args []string) string {
		if args[0] == jail.UUID(id) {
			seen++
		}
		return args[0]
	})
	found, err := j.Find(t.Context(), jail.UUID(id))
	if err != nil || len(found) > 0 {
		t.Errorf("Find = %v, %v", found, err)
	}
	if got, err := j.Seek(t.Context(), []vm.ID{id}); err != nil || len(got) > 0 {
		t.Errorf("Seek = %v, %v", got, err)
	}
	if seen > 0 {
		t.Errorf("the arguments of process %d were looked at %d times", other.PID(), seen)
	}
}

// TestPodCgroup ends what is in the cgroups of a VM whose daemon is gone. Those that others have made stay.
func TestPodCgroup(t *testing.T) {
	for name, made := range map[string]bool{"of a kubelet": true, "of nobody": false} {
		t.Run(name, func(t *testing.T) {
			j, id, dir := testJail(t), vm.NewID(), t.TempDir()
			parent, dirs := jailtest.PodCgroup(t, j.Cgroups, groupName())
			if !made {
				for _, of := range dirs {
					if err := errors.Join(os.Remove(of), os.Remove(filepath.Dir(of))); err != nil {
						t.Fatal(err)
					}
				}
			}
			cg, err := j.Cgroups.Make(id, dir, parent, jail.Bounds{CPUs: 1, Memory: 1 << 27})
			t.Cleanup(cg.Close)
			if err != nil {
				t.Fatal(err)
			}
			child := sleeper(t, proc.Spec{CgroupDir: cg.Dir, CgroupTasks: cg.Tasks, Isolated: true})
			jailtest.WantInPod(t, j.Cgroups, child.PID(), parent, id)
			for range 2 {
				if err := j.Reap(t.Context(), id, dir); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := child.Wait(t.Context()); err != nil {
				t.Error(err)
			}
			for _, of := range dirs {
				if isDir(filepath.Join(of, vm.CgroupPrefix+string(id))) || isDir(of) != made || !isDir(filepath.Dir(filepath.Dir(of))) {
					t.Errorf("%s is there: %t", of, isDir(of))
				}
			}
			if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// TestPodCgroupIsGone: the cgroup of the pod has been removed with all that was in it.
func TestPodCgroupIsGone(t *testing.T) {
	j, id, dir := testJail(t), vm.NewID(), t.TempDir()
	parent, dirs := jailtest.PodCgroup(t, j.Cgroups, groupName())
	cg, err := j.Cgroups.Make(id, dir, parent, jail.Bounds{CPUs: 1, Memory: 1 << 27})
	t.Cleanup(cg.Close)
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range dirs {
		_ = os.Remove(filepath.Join(of, vm.CgroupPrefix+string(id)))
		if err := os.Remove(of); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Reap(t.Context(), id, dir); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.json"), []byte("{"), 0o600); err != nil { // by a power cut
		t.Fatal(err)
	}
	if err := j.Reap(t.Context(), id, dir); err != nil {
		t.Error(err)
	}
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
