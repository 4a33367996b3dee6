package pull

import (
	"context"
	"maps"
	"net/url"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/vm"
)

// Verification says who must prove that they may use an image that the store has. The values are the kubelet's.
type Verification string

// The kinds of verification. The operator never has to prove anything.
const (
	VerifyPulled Verification = "NeverVerifyPreloadedImages" // everybody may use what was imported by hand; the default
	VerifyAll    Verification = "AlwaysVerify"               // only the operator may use what was imported by hand
	VerifyNone   Verification = "NeverVerify"                // everybody may use what the store has
)

// ParseVerification reads a setting; "" is the default.
func ParseVerification(s string) (Verification, error) {
	switch v := Verification(s); v {
	case "":
		return VerifyPulled, nil
	case VerifyPulled, VerifyAll, VerifyNone:
		return v, nil
	}
	return "", errdefs.Invalidf("invalid value %q; use NeverVerifyPreloadedImages, AlwaysVerify or NeverVerify", s)
}

// may reports whether the request of ctx may use an image in the store. If the request's credentials prove it, may records
// the namespace in the grant: VMs are made on behalf of a namespace, without credentials.
func (p *Puller) may(ctx context.Context, d translate.Decision, here found, auth []image.RegistryAuth) (bool, error) {
	who := vm.Behalf(ctx)
	if who.Operator() || p.cfg.Verify == VerifyNone {
		return true, nil
	}
	if d.Kind == translate.Mapped && d.URL != "" && here.origin.URL == d.Printable { // the operator's mapping decides: everybody may
		return true, nil
	}
	grants, err := p.grantsOf(ctx, d, here)
	if err != nil {
		return false, err
	}
	for of, g := range grants {
		if g.Public {
			return true, nil
		}
		shown, err := p.fingerprints(ctx, d, of, auth)
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(shown, func(k string) bool { return slices.Contains(g.Keys, k) }) {
			return true, p.grants.Grant(ctx, here.img.ID, of, image.Grant{Namespaces: []string{who.Namespace}})
		}
	}
	return p.preloaded(ctx, sourceOf(d, here), here)
}

// grantsOf returns the grants of the content that d may use: those of its source, or all if it has none.
func (p *Puller) grantsOf(ctx context.Context, d translate.Decision, here found) (map[string]image.Grant, error) {
	grants, err := p.grants.Grants(ctx, here.img.ID)
	if source := sourceOf(d, here); source != "" {
		maps.DeleteFunc(grants, func(of string, _ image.Grant) bool { return of != source })
	}
	return grants, err
}

// granted reports whether the owner in ctx has proved before that they may use the image.
func (p *Puller) granted(ctx context.Context, d translate.Decision, here found) (bool, error) {
	who := vm.Behalf(ctx)
	ok, err := p.may(ctx, d, here, nil)
	if ok || err != nil {
		return ok, err
	}
	grants, err := p.grantsOf(ctx, d, here)
	for _, g := range grants {
		ok = ok || slices.Contains(g.Namespaces, who.Namespace)
	}
	return ok, err
}

// preloaded reports whether the operator imported the image for everybody: under the requested name, or under any name if
// the request has an id.
func (p *Puller) preloaded(ctx context.Context, source string, here found) (bool, error) {
	if p.cfg.Verify == VerifyAll {
		return false, nil
	}
	if source == "" {
		return p.grants.Imported(ctx, "", here.img.ID)
	}
	return p.grants.Imported(ctx, here.img.Name, here.img.ID)
}

// sourceOf is the key of the name's grants: the registry's repository or the URL; "" when the name is an id, or resolves
// to an image that has another name.
func sourceOf(d translate.Decision, here found) string {
	switch {
	case d.Kind == translate.Local || !here.keyed:
		return ""
	case d.Ref != "":
		repo, err := distribution.Repository(d.Ref)
		if err != nil {
			return d.Ref
		}
		return repo
	}
	return d.Printable
}

// fingerprints returns the fingerprints of the request's credentials for a source.
func (p *Puller) fingerprints(ctx context.Context, d translate.Decision, source string, auth []image.RegistryAuth) ([]string, error) {
	if secret := urlSecret(d); secret != "" && source == d.Printable {
		k, err := p.grants.Fingerprint(ctx, "url", secret)
		return []string{k}, err
	}
	var out []string
	for _, a := range distribution.Covering(source, auth) {
		k, err := p.fingerprint(ctx, a)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

func (p *Puller) fingerprint(ctx context.Context, a image.RegistryAuth) (string, error) {
	return p.grants.Fingerprint(ctx, "registry", a.Username, a.Password, a.Token)
}

// urlSecret is the part of a pod's URL that may be secret: user, password and query.
func urlSecret(d translate.Decision) string {
	if d.Kind != translate.URL {
		return ""
	}
	u, err := url.Parse(d.URL)
	if err != nil {
		return d.URL
	}
	secret := u.User.String()
	if u.RawQuery != "" {
		secret += "?" + u.RawQuery
	}
	return secret
}

// record saves what a transfer has proved, for the content that it fetched.
func (p *Puller) record(ctx context.Context, d translate.Decision, id string, proof distribution.Proof) error {
	var g image.Grant
	source := proof.Repository
	switch secret := urlSecret(d); {
	case d.Ref != "" && source == "", // the registry was not asked
		d.Ref == "" && d.Kind == translate.Mapped: // fetched with the operator's secrets; the mapping decides who may use it
		return nil
	case proof.Auth != nil:
		k, err := p.fingerprint(ctx, *proof.Auth)
		if err != nil {
			return err
		}
		g.Keys = []string{k}
	case d.Ref != "":
		g.Public = true
	case secret != "":
		k, err := p.grants.Fingerprint(ctx, "url", secret)
		if err != nil {
			return err
		}
		source, g.Keys = d.Printable, []string{k}
	default:
		source, g.Public = d.Printable, true
	}
	if who := vm.Behalf(ctx); !who.Operator() && !g.Public {
		g.Namespaces = []string{who.Namespace}
	}
	return p.grants.Grant(ctx, id, source, g)
}

// ask asks the registry whether the request may use exactly the image in the store. NotFound if the registry no longer has
// it.
func (p *Puller) ask(ctx context.Context, d translate.Decision, here found, r image.PullRequest, progress func(image.Progress)) error {
	repo, err := distribution.Repository(d.Ref)
	if err != nil {
		return err
	}
	if progress != nil {
		progress(image.Progress{Phase: image.PhaseResolve, Total: -1})
	}
	proof, err := p.from(ctx, d).registry.Verify(ctx, repo+"@"+here.origin.Digest, r.Auth)
	if err != nil {
		return err
	}
	return p.record(ctx, d, here.img.ID, proof)
}

// foreign is the error for an image that exists here but that the request may not use.
func foreign(ctx context.Context, name translate.Name) error {
	return errdefs.NotFoundf("namespace %s has not proved that it may use the image %s; give the pod imagePullSecrets for its registry and the policy IfNotPresent or Always", vm.Behalf(ctx).Namespace, name)
}
