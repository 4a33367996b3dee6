package appliance

import (
	"context"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/identity"
)

// identities implements IdentityService.
type identities struct {
	capsulev1.UnimplementedIdentityServiceServer
	door *Door
}

// Adopt implements capsulev1.IdentityServiceServer.
func (i *identities) Adopt(ctx context.Context, req *capsulev1.AdoptRequest) (*capsulev1.AdoptResponse, error) {
	k := i.door.deps.Identity
	key, err := k.Adopt(ctx, req.GetPubkey(), req.GetName())
	if err != nil {
		return nil, err
	}
	i.door.announcer.Update(true)
	return &capsulev1.AdoptResponse{CapsuleId: k.ID(), Kid: key.Kid(), TlsFingerprintSha256: k.Fingerprint()}, nil
}

// WhoAmI implements capsulev1.IdentityServiceServer.
func (i *identities) WhoAmI(ctx context.Context, _ *capsulev1.WhoAmIRequest) (*capsulev1.WhoAmIResponse, error) {
	key := callerOf(ctx)
	return &capsulev1.WhoAmIResponse{CapsuleId: i.door.deps.Identity.ID(), Kid: key.Kid(), Name: key.Name, Role: key.Role}, nil
}

// KeyAdd implements capsulev1.IdentityServiceServer.
func (i *identities) KeyAdd(ctx context.Context, req *capsulev1.KeyAddRequest) (*capsulev1.KeyAddResponse, error) {
	key, err := i.door.deps.Identity.Add(ctx, req.GetPubkey(), req.GetName(), req.GetRole(), callerOf(ctx).Kid())
	if err != nil {
		return nil, err
	}
	return &capsulev1.KeyAddResponse{Key: encodeKey(key)}, nil
}

// KeyList implements capsulev1.IdentityServiceServer.
func (i *identities) KeyList(context.Context, *capsulev1.KeyListRequest) (*capsulev1.KeyListResponse, error) {
	resp := &capsulev1.KeyListResponse{}
	for _, key := range i.door.deps.Identity.Keys() {
		resp.Keys = append(resp.Keys, encodeKey(key))
	}
	return resp, nil
}

// KeyRemove implements capsulev1.IdentityServiceServer.
func (i *identities) KeyRemove(ctx context.Context, req *capsulev1.KeyRemoveRequest) (*capsulev1.KeyRemoveResponse, error) {
	return &capsulev1.KeyRemoveResponse{}, i.door.deps.Identity.Remove(ctx, req.GetKid())
}

// Audit implements capsulev1.IdentityServiceServer.
func (i *identities) Audit(_ context.Context, req *capsulev1.AuditRequest) (*capsulev1.AuditResponse, error) {
	return &capsulev1.AuditResponse{Entries: i.door.audit.last(int(req.GetTail()))}, nil
}

func encodeKey(k identity.Key) *capsulev1.AuthorizedKey {
	return &capsulev1.AuthorizedKey{Kid: k.Kid(), Name: k.Name, AddedByKid: k.AddedBy, AddedAtUnix: k.AddedAt.Unix(), Role: k.Role}
}
