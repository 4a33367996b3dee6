package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestProcessOver(t *testing.T) {
	path := EnvVar{Name: "PATH", Value: DefaultPath}
	image := Process{
		Entrypoint: []string{"/init"}, Args: []string{"serve"},
		Env:     []EnvVar{{Name: "PATH", Value: "/bin"}, {Name: "A", Value: "1"}},
		WorkDir: "/srv", User: "web",
	}
	tests := map[string]struct {
		image, spec, want Process
	}{
		"nothing asked keeps the image": {
			image: image, want: image,
		},
		"args keep the entrypoint": {
			image: image, spec: Process{Args: []string{"help"}},
			want: Process{Entrypoint: []string{"/init"}, Args: []string{"help"}, Env: image.Env, WorkDir: "/srv", User: "web"},
		},
		"entrypoint drops the image's args": {
			image: image, spec: Process{Entrypoint: []string{"sh"}},
			want: Process{Entrypoint: []string{"sh"}, Env: image.Env, WorkDir: "/srv", User: "web"},
		},
		"both": {
			image: image, spec: Process{Entrypoint: []string{"sh"}, Args: []string{"-c", "true"}},
			want: Process{Entrypoint: []string{"sh"}, Args: []string{"-c", "true"}, Env: image.Env, WorkDir: "/srv", User: "web"},
		},
		"env by name, last wins, order kept": {
			image: image, spec: Process{Env: []EnvVar{{Name: "B", Value: "x"}, {Name: "A", Value: "2"}, {Name: "B", Value: "y"}}},
			want: Process{
				Entrypoint: []string{"/init"}, Args: []string{"serve"}, WorkDir: "/srv", User: "web",
				Env: []EnvVar{{Name: "PATH", Value: "/bin"}, {Name: "A", Value: "2"}, {Name: "B", Value: "y"}},
			},
		},
		"user, workdir, tty": {
			image: image, spec: Process{WorkDir: "/tmp", User: "0:0", TTY: true},
			want: Process{Entrypoint: []string{"/init"}, Args: []string{"serve"}, Env: image.Env, WorkDir: "/tmp", User: "0:0", TTY: true},
		},
		"a group alone keeps the user, security is the spec's": {
			image: Process{Args: []string{"x"}, WorkDir: "/", User: "web:7", StopSignal: "SIGQUIT", Env: []EnvVar{path}},
			spec:  Process{User: ":5", Security: &Security{Groups: []int64{1}}},
			want: Process{
				Args: []string{"x"}, WorkDir: "/", User: "web:5", StopSignal: "SIGQUIT", Env: []EnvVar{path}, Security: &Security{Groups: []int64{1}},
			},
		},
		"stop signal": {
			image: Process{Args: []string{"x"}, WorkDir: "/", StopSignal: "SIGQUIT", Env: []EnvVar{path}}, spec: Process{StopSignal: "SIGUSR1"},
			want: Process{Args: []string{"x"}, WorkDir: "/", StopSignal: "SIGUSR1", Env: []EnvVar{path}},
		},
		"only args in the image": {
			image: Process{Args: []string{"bash"}},
			want:  Process{Args: []string{"bash"}, Env: []EnvVar{path}, WorkDir: "/"},
		},
		"no program": {
			want: Process{Env: []EnvVar{path}, WorkDir: "/"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := tt.spec.Over(tt.image)
			if d := diff.Of(tt.want, got); d != "" {
				t.Error(d)
			}
			if got.Empty() != (len(got.Entrypoint)+len(got.Args) == 0) {
				t.Errorf("Empty() = %v", got.Empty())
			}
		})
	}
}

func TestCloneSharesNothing(t *testing.T) {
	code := 3
	r := Record{
		Spec:  Spec{Labels: map[string]string{"a": "b"}, Process: Process{Env: []EnvVar{{Name: "A", Value: "1"}}}, NICs: []NICSpec{{Network: "n"}}},
		Disks: []Disk{{Path: "cow", Backing: &Disk{Path: "base"}}},
		NICs:  []NIC{{DNS: []string{"1.1.1.1"}}}, Handle: []byte("h"), ExitCode: &code,
	}
	c := r.Clone()
	if d := diff.Of(r, c); d != "" {
		t.Fatalf("the clone differs: %s", d)
	}
	c.Spec.Labels["a"] = "x"
	c.Spec.Process.Env[0].Value = "x"
	c.Spec.NICs[0].Network = "x"
	c.Disks[0].Backing.Path = "x"
	c.NICs[0].DNS[0] = "x"
	c.Handle[0] = 'x'
	*c.ExitCode = 4
	if r.Spec.Labels["a"] != "b" || r.Spec.Process.Env[0].Value != "1" || r.Spec.NICs[0].Network != "n" ||
		r.Disks[0].Backing.Path != "base" || r.NICs[0].DNS[0] != "1.1.1.1" || r.Handle[0] != 'h' || *r.ExitCode != 3 {
		t.Errorf("a change of the clone reached the original: %+v", r)
	}
}
