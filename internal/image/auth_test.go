package image

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

func TestDockerConfigurations(t *testing.T) {
	for name, tc := range map[string]struct {
		data string
		old  bool
		want []RegistryAuth
		bad  bool
	}{
		"user and password": {
			data: `{"auths":{"b.example":{"username":"u","password":"p:q"},"a.example:5000/x":{"auth":"` + b64("me:se:cret") + `"}}}`,
			want: []RegistryAuth{
				{Registry: "a.example:5000/x", Username: "me", Password: "se:cret"}, {Registry: "b.example", Username: "u", Password: "p:q"},
			},
		},
		"auth wins": {
			data: `{"auths":{"a":{"username":"u","password":"p","auth":"` + b64("v:w") + `"}}}`,
			want: []RegistryAuth{{Registry: "a", Username: "v", Password: "w"}},
		},
		"no padding": {
			data: `{"auths":{"a":{"auth":"` + strings.TrimRight(b64("v:wx"), "=") + `"}}}`,
			want: []RegistryAuth{{Registry: "a", Username: "v", Password: "wx"}},
		},
		"tokens": {
			data: `{"auths":{"a":{"identitytoken":"i"},"b":{"registrytoken":"r"}},"credsStore":"desktop"}`,
			want: []RegistryAuth{{Registry: "a", Token: "i"}, {Registry: "b", Token: "r"}},
		},
		"the old form": {data: `{"a":{"username":"u","password":"p"}}`, old: true, want: []RegistryAuth{{Registry: "a", Username: "u", Password: "p"}}},
		"nothing":      {data: `{}`},
		"no json":      {data: `hunter2`, bad: true},
		"no base64":    {data: `{"auths":{"a":{"auth":"hunter2!"}}}`, bad: true},
		"no colon":     {data: `{"auths":{"a":{"auth":"` + b64("hunter2") + `"}}}`, bad: true},
	} {
		parse := ParseDockerConfig
		if tc.old {
			parse = ParseDockerCfg
		}
		got, err := parse([]byte(tc.data))
		if !slices.Equal(got, tc.want) || tc.bad != errdefs.IsInvalid(err) || !tc.bad && err != nil {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error tells the secret: %v", name, err)
		}
	}
}

func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"a.example":{"auth":"` + b64("u:p") + `"}}}`))
	f.Add([]byte(`{"a.example":{"username":"u","password":"p"}}`))
	f.Add([]byte(`{"auths":null}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, parse := range []func([]byte) ([]RegistryAuth, error){ParseDockerConfig, ParseDockerCfg} {
			if auth, err := parse(data); err != nil && (auth != nil || !errdefs.IsInvalid(err)) {
				t.Errorf("%v with %v", auth, err)
			}
		}
	})
}
